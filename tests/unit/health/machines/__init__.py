"""Facts of whole machines as people own them: a table of shapes, each from a public source."""
