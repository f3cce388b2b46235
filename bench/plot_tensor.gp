# Draws tensor.svg from tensor.dat in the current folder: time of a transformer block over tensor ranks,
# split into compute and waiting for collectives. Called by run.sh.
set terminal svg noenhanced size 1000,460 font "Helvetica,13" background "white"
set output "tensor.svg"
set title "ddp_tensor.h: forward and backward of one transformer block" font ",15"
set style data histograms
set style histogram rowstacked gap 1
set boxwidth 0.7
set style fill solid 0.9 border -1
set ylabel "milliseconds"
stats "tensor.dat" using ($2 + $3) nooutput
set yrange [0:STATS_max * 1.3]
set grid y lc rgb "#dddddd"
set key top right reverse Left samplen 1
set xtics rotate by 30 right font ",11"
set bmargin 8
plot "tensor.dat" using 2:xtic(1) title "compute" lc rgb "#0072b2", \
     "" using 3 title "waiting for collectives" lc rgb "#e69f00"
