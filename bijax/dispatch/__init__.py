"""Which kernel serves a call, under which contract: chosen when a program is lowered."""
