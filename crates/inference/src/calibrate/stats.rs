//! Statistics of the rows that enter a matrix.

/// Weight of the newest chunk in the running range.
const RANGE_ALPHA: f32 = 0.05;
/// A channel is an outlier when its standard deviation is above this multiple of the mean one.
const OUTLIER_FACTOR: f64 = 2.5;

/// Squares of larger values leave f32 when they are summed.
const LARGEST: f32 = 1e16;

/// What is known of the inputs of a matrix, by column (input channel).
#[derive(Debug, Clone, PartialEq)]
pub struct InputStats {
    /// Rows (tokens) seen.
    pub count: u64,
    sum: Vec<f64>,
    sum2: Vec<f64>,
    sum_abs: Vec<f64>,
    max_abs: Vec<f32>,
    range: Option<(f32, f32)>,
}

impl InputStats {
    /// Of rows of `columns` values.
    #[must_use]
    pub fn new(columns: usize) -> Self {
        let zeros = vec![0.0; columns];
        let max_abs = vec![0.0; columns];
        Self { count: 0, sum: zeros.clone(), sum2: zeros.clone(), sum_abs: zeros, max_abs, range: None }
    }

    /// Adds one chunk of rows.
    ///
    /// # Errors
    /// The column and value of the first number that is not finite, or whose square f32 cannot sum; nothing is added
    /// then.
    pub fn add(&mut self, rows: &[f32]) -> Result<(), (usize, f32)> {
        let columns = self.sum.len();
        if let Some(at) = rows.iter().position(|v| v.is_nan() || v.abs() > LARGEST) {
            return Err((at % columns, rows[at]));
        }
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for row in rows.chunks_exact(columns) {
            for (j, &v) in row.iter().enumerate() {
                let wide = f64::from(v);
                self.sum[j] += wide;
                self.sum2[j] += wide * wide;
                self.sum_abs[j] += wide.abs();
                self.max_abs[j] = self.max_abs[j].max(v.abs());
                low = low.min(v);
                high = high.max(v);
            }
            self.count += 1;
        }
        if low <= high {
            let blend = |old: f32, new: f32| RANGE_ALPHA * new + (1.0 - RANGE_ALPHA) * old;
            self.range = Some(self.range.map_or((low, high), |(l, h)| (blend(l, low), blend(h, high))));
        }
        Ok(())
    }

    fn mean(&self, sums: &[f64]) -> Vec<f32> {
        let n = self.count.max(1) as f64;
        sums.iter().map(|s| (s / n) as f32).collect()
    }
    /// Sum of squares of each column.
    #[must_use]
    pub fn sum2(&self) -> Vec<f32> {
        self.sum2.iter().map(|s| *s as f32).collect()
    }
    /// Mean square of each column.
    #[must_use]
    pub fn mean_square(&self) -> Vec<f32> {
        self.mean(&self.sum2)
    }
    /// Mean magnitude of each column.
    #[must_use]
    pub fn mean_abs(&self) -> Vec<f32> {
        self.mean(&self.sum_abs)
    }
    /// Largest magnitude of each column.
    #[must_use]
    pub fn max_abs(&self) -> &[f32] {
        &self.max_abs
    }
    /// Standard deviation of each column.
    #[must_use]
    pub fn deviation(&self) -> Vec<f64> {
        let n = self.count.max(1) as f64;
        self.sum.iter().zip(&self.sum2).map(|(s, s2)| (s2 / n - (s / n).powi(2)).max(0.0).sqrt()).collect()
    }
    /// Columns whose standard deviation is above 2.5 times the mean one.
    #[must_use]
    pub fn outlier_channels(&self) -> Vec<usize> {
        let deviation = self.deviation();
        let limit = OUTLIER_FACTOR * deviation.iter().sum::<f64>() / deviation.len().max(1) as f64;
        (0..deviation.len()).filter(|j| deviation[*j] > limit).collect()
    }
    /// Columns that never saw anything but zero.
    #[must_use]
    pub fn dead_channels(&self) -> Vec<usize> {
        (0..self.sum2.len()).filter(|j| self.sum2[*j] == 0.0).collect()
    }
    /// Smallest and largest value, each a running average over chunks: `0.05 · chunk + 0.95 · before`.
    #[must_use]
    pub fn running_range(&self) -> Option<(f32, f32)> {
        self.range
    }
}
