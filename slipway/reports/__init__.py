"""Text for the console; the record of an evaluation and the pages have rooms of their own."""
