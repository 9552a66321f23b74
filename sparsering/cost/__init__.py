"""What a call costs: counts, bytes and seconds, by arithmetic and by calibration."""
