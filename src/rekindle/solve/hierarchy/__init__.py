"""HiRemate and Rockmate: options of parts, put together level by level."""
