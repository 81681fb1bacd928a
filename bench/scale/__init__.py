"""How kvloop behaves with hundreds of workers and a hundred thousand conversations."""
