"""The report page: measured tables next to the prior documents' figures."""
