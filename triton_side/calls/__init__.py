"""Recording a call's operations and kernel launches, with what each kernel declares, reads and writes, and its code."""
