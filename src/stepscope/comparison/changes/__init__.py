"""What grew, shrank, came or went between two sides, one file per kind; `compare.kinds` puts them together."""
