"""The cloud side: the aggregator of a job, its journal and its checkpoints."""
