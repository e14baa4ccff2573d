"""Islands that train alone for some steps, and the hub through which they exchange weights."""
