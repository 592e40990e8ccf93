"""Recognise the suite's blocks in a user's program, from operations and shapes (`recognise.recognise`)."""
