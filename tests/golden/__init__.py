"""What every surface says of known inputs, kept: a change that moves a figure shows which, and on which surface."""
