"""The subject of a comparison: tensors, cases, implementations and blocks; `blocks/` is the table of them."""
