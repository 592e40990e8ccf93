"""The drawing of fusion graphs side by side in a page."""
