"""What a run will take, from configs alone: parameters, memory, disk, hours."""
