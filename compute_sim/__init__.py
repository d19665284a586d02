"""A simulated fleet: a driver whose machines exist only in memory or in a file, with planned faults; and a stand-in for
Ironic.
"""
