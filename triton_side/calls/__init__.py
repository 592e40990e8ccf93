"""Operations and launches of a call: what each kernel reads, writes, declares and becomes."""
