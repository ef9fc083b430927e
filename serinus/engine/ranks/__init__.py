"""ranks: an engine of several ranks. The leader decides and orders, each rank obeys in order."""
