"""One call of a layer's attention: its mask, the source of its pairs, its cache."""
