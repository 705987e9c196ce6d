"""What people read: tables on the console, pages that open without internet, and the record of an evaluation."""
