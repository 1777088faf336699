"""The rows of the table, a file for each way in which operators run on parts."""
