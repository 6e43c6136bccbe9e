"""What `stepscope view` serves: the front end, and the documents it draws, to whoever holds the token.

`security.py` decides what is answered at all, `catalog.py` knows the runs, `prepare.py` reads and keeps those that are
looked at, `live.py` follows one that goes on, `app.py` is the table of addresses, `start.py` binds and runs it.
"""
