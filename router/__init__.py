"""The router: a core that decides and does no I/O, and the shell that carries its decisions out."""
