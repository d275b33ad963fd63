"""Tool calls: their formats in the text of a model, grammars that hold a text to them, and the parser."""
