"""What all analyses stand on, one implementation of each: traces as arrays, their tree of slices, steps, code, samples.

Nothing here judges or knows of a report; docs/architecture.md says what each file holds.
"""
