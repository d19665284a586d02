"""Requests about an instance after its build: checked, destinations chosen, recorded."""
