"""A key-value store on actors: each key on one shard, each put a version that is whole or not there."""
