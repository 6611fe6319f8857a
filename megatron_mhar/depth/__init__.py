"""The depth history: which sources every routing site reads, and the object that holds them."""
