"""What the commands do, one module per job; `dat.cli` parses their arguments."""
