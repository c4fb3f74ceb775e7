"""`dat selftest`: an acceptance test of this hardware, whose report users attach to an issue."""
