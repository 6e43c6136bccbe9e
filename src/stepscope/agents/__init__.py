"""Runs, for coding agents: a server of the Model Context Protocol, read-only unless it is told otherwise.

`jobs` opens what lies below one folder, starts commands and ends them, `tools` says what can be asked for, `server`
speaks the protocol. Answers are those of `report.brief`: JSON of bounded size.
"""
