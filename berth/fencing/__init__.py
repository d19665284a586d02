"""Fencing: a host whose compute service is silent is switched off by a plug-in, and then fenced."""
