"""What the command ``lens`` does: it runs, examines and reads back jobs that trace."""
