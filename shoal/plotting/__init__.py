"""Pictures of runs, pipeline schedules and traces."""
