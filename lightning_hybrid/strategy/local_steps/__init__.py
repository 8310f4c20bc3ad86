"""Local SGD: nodes train independently and average their weights, with an optional outer step."""
