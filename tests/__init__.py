"""The test suite; mirrors src/stepscope."""
