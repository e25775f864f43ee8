"""Reading runs back: what the processes of a run wrote, put together."""
