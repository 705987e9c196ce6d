"""Does the traffic still look like the rows that the model was made and judged with, and is it still as good?"""
