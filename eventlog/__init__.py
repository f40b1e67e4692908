"""The log: topics, codec, Kafka client, in-memory log, embedded broker and artifact store."""
