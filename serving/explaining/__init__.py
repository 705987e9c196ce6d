"""What one answer of the model rests on: the places of an image, or the columns of a row."""
