"""`kvloop top`: the router's status page in a terminal."""
