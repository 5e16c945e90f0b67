"""What every part of kvpool agrees on: identity, wire messages, slot table layout, errors. Pure: no input or output."""
