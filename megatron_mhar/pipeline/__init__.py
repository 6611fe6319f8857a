"""How a depth history crosses pipeline stages."""
