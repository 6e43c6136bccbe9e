"""Runs, for coding agents: a server of the Model Context Protocol, read-only unless it is told otherwise.

`open_runs` opens what lies below one folder, `tools` says what can be asked for, `jobs` starts commands and ends them,
`server` speaks the protocol. Answers are those of `report.brief`: JSON of bounded size.
"""
