"""What people read, on the console; the record of an evaluation and the pages have rooms of their own."""
