"""DeepSpeed's path to its CPU optimizer."""
