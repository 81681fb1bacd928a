"""What retained turns cost an engine that does nothing else."""
