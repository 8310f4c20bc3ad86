"""Local SGD, in which nodes train independently and average weights, with an optional outer step."""
