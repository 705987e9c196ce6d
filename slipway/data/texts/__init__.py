"""Data of texts: reads the columns of a table that hold them, cleans and packs them."""
