"""The data of the drawing that shows fusion graphs side by side."""
