"""Cheap launches of kernels, and recordings of a call: its launches, and what each kernel declares and accesses."""
