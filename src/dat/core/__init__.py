"""The foundation: threat model, losses, random streams, settings and files."""
