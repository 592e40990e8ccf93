"""A user's program in the terms of its author: parts of the model, phases of a step, layers."""
