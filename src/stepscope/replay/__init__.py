"""One operator of a recorded run alone, on other devices, threads and dtypes: what of it is the operator's own."""
